"""``kvlink demo``: a real model, prefilled in one process and decoded in another.

The parent never loads the model. It starts worker processes and talks to each over a pipe, in
lines of JSON (``messages``): a reference that runs stock ``generate``, prefill workers that see
the prompts, and decode workers that see tickets only.
"""
