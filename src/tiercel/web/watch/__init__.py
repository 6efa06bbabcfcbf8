"""The live side of the site: what a store does now and did lately, and the few calls that steer it.

    a source (a store here, a daemon, a server) -> Watch (reads it, keeps an hour) -> endpoints -> page

Only reads, but for calls that carry the token. A fault here never reaches a store or a request.
"""
