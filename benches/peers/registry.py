"""Contenders by workload. A contender is a factory that a fresh process calls once."""

import collections

CONTENDERS = collections.defaultdict(dict)
OURS = "drivetrain"


def register(workload, name):
    """Decorator: makes a factory a contender of the workload under this name."""

    def add(factory):
        CONTENDERS[workload][name] = factory
        return factory

    return add
