"""Engine `analytical`: closed formulas over arrays of plans."""
