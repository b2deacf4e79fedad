"""Policies against a changing cluster: scenarios, baseline policies, the clairvoyant bound, evaluation."""
