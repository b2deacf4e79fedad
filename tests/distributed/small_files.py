"""A job and a lab as text, for runs that read them from files."""

SLOW_JOB = """
import time, torch
from torch import nn

def model(): return [nn.Linear(4, 4), nn.Linear(4, 1)]
def inputs(batch): return batch
def loss(output, batch): return output.square().sum(), len(output)
def optimizer(params): return torch.optim.SGD(params, lr=1e-6)

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.full((4,), float(index))

def dataset(): return Slow()
"""
TWO_RANKS = """
clock = "table"
[[ranks]]
slow = 1
[[ranks]]
slow = 2
[network]
bandwidth = "100 Gb/s"
latency = "10 us"
[table]
forward = "1 ms"
backward = "2 ms"
optimizer = "1 ms"
"""
