"""The scheduler service of Reprise."""
