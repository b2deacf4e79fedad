"""From measured steps to the next plan: the controller and baseline policies inside a run."""
