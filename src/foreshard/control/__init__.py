"""The online controller: which plan to run next while speeds, links, prices and ranks change.

Facts come in as `spec.online` events (measured steps, prices, ranks lost or back), commands with a whole
`Plan` go out; there is no clock, file or network in it. `estimation` says what the cluster is like now,
`budgets` the weights of time and of each cost that keep long-term budgets, `search` which structure is best
at these weights; `controller` decides whether changing to it pays, and `experts` whether to keep a plan that
stays instead, because forecasts were wrong of late. Read `controller` first, then `slots`, which has the
model of one step that everything shares. Other policies are in `policies`; a new policy is a class there,
which gets the same events and orders plans as the controller does.
"""
