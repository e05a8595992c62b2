import torch


def test_sum(ranks):
    def f(r, x):
        return r.sum(torch.tensor([float(r.rank + x)])).item(), r.gather(r.rank)

    assert ranks.run(f, 2, 1) == [(3.0, [0, 1])] * 2
    assert ranks.run(f, 3, 1) == [(6.0, [0, 1, 2])] * 3
    assert ranks.run(f, 1, 1) == [(1.0, [0])]
