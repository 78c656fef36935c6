"""Model files: finding them (hub), checking them (gguf), chat templates (template), quantising (quantize), loading."""
