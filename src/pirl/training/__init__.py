"""How it runs: the loop, practice, measurements, checkpoints, and the layout over devices and hosts.

Where to find what:

- the loop: `trainer` (from a configuration to the end of a run), `setup` (its data, statistics, policy and learner),
  `learners` (which learner), `updates` (compiled programs), `compiling`, `dry_run`;
- the run directory: `run` (begun, resumed, overwritten), `checkpoints` (saved and restored), `records` (what lies beside
  the arrays), `retention` (which are kept); to look at them, `loading`, `inspecting` and `differences`;
- practice: `practice` (what the trainer knows of it), `practising` (which one a run has), `online` (ACRLPD's),
  `iterations` (RIPT's) with `rollout_batches`, `rollout_records`, `iteration_table` and `drift`; `acting` (how learners
  act, there and where they are measured);
- what is watched: `measuring` (losses and success), `metrics` and `writers` (where they are written), `display` and
  `words` (what a person sees), `memory`, `health` and `iteration_health` (when something goes wrong), `rollbacks`;
- several devices and hosts: `sharding`, `hosts` and `supervising` (who belongs to the run, and who is lost), `exchange`
  (words between them), `following` and `shared_practice` (what hosts but the first do).
"""
