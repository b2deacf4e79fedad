"""When every task of a program runs."""
