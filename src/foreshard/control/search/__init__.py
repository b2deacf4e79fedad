"""The best structure for one decision, at given weights of time and costs.

A slot is one decision, a chain the layers and workers as numbers, a structure a plan without shares. A
`Chain`, a `State` and weights go in, a `Choice` comes out: groups of workers, their layers, their samples.
`slot_search` searches by tentative moves over `candidates`; what differs between pipelines side by side and
one pipeline of wide stages is in `pipelines` and `wide_stages`. `pricing` says what a structure takes and
costs, `cuts` finds the layers of stages, `shares` the samples of groups, `subsets` lists all subsets of
replicas. Read `slot_search` first.
"""
