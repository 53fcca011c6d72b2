"""What two distributions and two curves have to do with each other: KL, NLL, agreement, intervals.

Metrics read tensors and rows, never the engine. Import the modules directly: `divergence` needs
torch, `positions` and `summary` do not.
"""
