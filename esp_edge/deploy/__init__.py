"""Beyond one machine: replicas on Ray Serve (:mod:`esp_edge.deploy.ray`). How and when: docs/scale.md.

One request: proxy of Ray -> gateway (reads the body, knows the prefix) -> router (chooses the replica) -> replica (one
engine behind the same application that ``esp-edge serve`` runs). Only ``ray.py`` imports Ray.
"""
