"""The parameter server of several processes: servers, and movers beside the workers' scripts.

==============  ================================================================================
`node`          the process that mpirun starts: a server, or a mover
`server`        the loop of a server
`keeping`       the keys that a server keeps: rounds, updates and answers, without messages
`mover`         the process beside a worker's script: it speaks with others, the script does not
`link`          the script's end of it
`buffers`       the arrays that script and mover share
`protocol`      messages and transfers between movers and servers
`queues`        the order of transfers: by priority, then first come, first served
`placement`     the parts of a key, and the server that keeps each
==============  ================================================================================
"""
