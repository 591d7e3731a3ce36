"""Deploying a model with one command: scaffold, run the phases, keep the ledger, predict, promote.

`npu-deploy` (`npu_deploy.cli`) is a thin shell around the functions here. Exit codes of every command:

====  ==========================================================================================
0     done; for `run`: every requested phase is PASS
1     a gate failed
2     wrong usage: unknown model or option, target or dtype that is not offered
3     the architecture is out of scope
4     `--npu` without a usable NPU
5     nothing to judge by: a requested phase has no test, or none of its tests ran to the end
6     the checkpoint is missing, torn or contradicts its configuration
7     a precondition fails: folder exists, nothing to write to, the phase before has no PASS
130   interrupted
====  ==========================================================================================
"""
