"""Collectives: their cost on a cluster, the choice NCCL would make, the seams of the communication layers."""
