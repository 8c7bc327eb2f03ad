"""The overlap lab: ranks on one machine with slow, real links between them, to measure what overlap hides.

    network.py   a network namespace for each host, links shaped to a rate by the kernel
    launch.py    a program's ranks, one on each host
    limited.py   where namespaces are not to be had: `torch.distributed` with a rate limit, inside the program
    replaced.py  a function for another, wherever a module has it
    link.py      both as a benchmark uses them
    probe.py     what a link gives; `python -m benchmarks.lab --ranks 2 --rate 50e6` prints it

    with network.hosts(2, bytes_per_second=50e6) as lab:
        outputs = launch.run(lab, ["-m", "benchmarks.lab.probe"], ranks=2, timeout=60)

A result says on which of the two it was measured: `Network.kind` or `Limit.kind`.
"""
