"""`reprise serve`: the whole system as local processes under a supervisor."""
