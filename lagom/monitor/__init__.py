"""What driver and ranks tell each other during a run; both sides, standard library only."""
