"""The gateway service of Reprise."""
