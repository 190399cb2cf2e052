"""The worker service of Reprise."""
