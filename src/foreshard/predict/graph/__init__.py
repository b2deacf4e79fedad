"""Engine `graph`: a step as a program of tasks, executed exactly."""
