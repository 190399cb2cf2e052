"""The store service of Reprise."""
