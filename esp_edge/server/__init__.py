"""The HTTP server: an OpenAI-compatible API over one engine. Start reading at ``app.py``."""
