"""The project's own engine: scheduler, requests, compiled steps, sampling, drafts, prefix cache, text."""
