"""The benchmark's parts.

tables.py   what is measured: the benchmarks, their columns and sizes
problems.py the numbers to compute with: a layer, a GPT-2, its prompts and batches
peer_*.py   how each library computes, the only files that import one
worker.py   the process of one peer
workers.py  the processes of all peers: asked in turn, compared, timed
page.py     what is printed and drawn
log.md      what was tried for speed
"""
