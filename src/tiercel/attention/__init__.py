"""Attention that reads less than all of the KV: what each method keeps, drops or skips, exactly defined.

Every method here is approximate but `full`. Nothing of it is used by an engine that promises exact answers:
it is for judging (`tiercel eval`) and for what a user switches on knowingly.
"""
