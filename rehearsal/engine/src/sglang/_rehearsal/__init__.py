"""The rehearsal engine's parts.

settings      the pace file          releases   what differs between releases
options       command line           config_file  --config
server_args   resolution and rules   logs       prefixes, formatter, suffix
shapes        the lines it prints    frames     where real SGLang's tracebacks point
failures      what can go wrong      rank       one scheduler process
speculation   tokens on paper        parent     the main process
http_api      endpoints              metrics    /metrics
process       titles, signals        model      config.json of target and drafter
"""
