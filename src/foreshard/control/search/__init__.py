"""Which structure is best in one slot, at given weights of time and costs.

A `Chain`, a `State` and weights go in, a `Choice` comes out: groups of workers, their layers, their
samples. `slot_search` searches by tentative moves over `candidates`; what differs between pipelines side by
side and one pipeline of wide stages is in `pipelines` and `wide_stages`. `pricing` says what a structure
takes and costs, `cuts` finds the layers of stages, `shares` the samples of groups, `subsets` lists all
subsets of replicas. Read `slot_search` first.
"""
