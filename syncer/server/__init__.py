"""The server: the only room with sockets, clocks and threads. Must not decide rounds: core does.

Entry points: `python -m syncer.server`, `syncer serve`, and `syncer.server.service.serve(config)`.
"""
