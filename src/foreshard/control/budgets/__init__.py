"""What a second and each cost weigh, so that every budget is kept in the long run.

Measured costs go in, weights come out. `queues` has the virtual queues of drift plus penalty,
`dual_learning` places them by what the states seen so far make of the budgets (`dual` solves for that),
`objective` is what a slot then minimises. Read `queues` first. A new kind of budget is a new kind of cost:
`control/slots.py` names the kinds, `control/search/costs.py` has what a batch costs of each,
`runtime/adaptive/budgets.py` what a real step did.
"""
