"""Who trains: rendezvous store, supervisor, host agents, generations, and recovery after a loss or a join."""
