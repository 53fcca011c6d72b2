"""Why a stored state drifts: closed forms, instrumented scans, and what rows of studies say.

`theory` and `growth` need no torch. `synthetic` and `observer` run scans on op inputs; nothing here
runs a model: `quantlab.study` does.
"""
