"""What a second and each cost weigh, so that every budget is kept in the long run.

Measured costs go in, weights come out. `queues` has the virtual queues of drift plus penalty, `dual_learning`
sets the queues to the multipliers of the states seen so far, which `dual` computes, `objective` is what a
slot then minimises. Read `queues` first. A new kind of budget is a new kind of cost: `control/slots.py` names
the kinds, `control/search/costs.py` what a structure costs, and docs/design.md lists every other place.
"""
