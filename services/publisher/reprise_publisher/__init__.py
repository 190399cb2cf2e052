"""The publisher service of Reprise."""
