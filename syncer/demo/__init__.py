"""The demo: real processes train a real model through a real server on one machine.

What a newcomer sees first. Nothing here is needed to serve or to train; only the command line
imports it. Two doors, `command` (`syncer demo`) and `learner` (`python -m syncer.demo.learner`),
what they are asked for (`run_plan`, `settings`), and three shelves: `model` is what is trained,
`show` what is known of a run and how it looks, `processes` who runs. Imports go from processes to
show to model, never back.
"""
