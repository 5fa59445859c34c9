"""States that tests save, and what it means that one came back."""

import struct

import torch


def same(a, b):
    """Equal in type, order and bits: NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return type(b) is float and struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and a == b


def trained(seed):
    """State of a small model and of its optimizer after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(6, 5)).square().sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
