"""The judge: what a lossy way of keeping or reading KV does to a model's answers, measured before it is used.

Texts, scores, figures, verdicts and reports. How a policy works is `tiercel.attention`'s; nothing here
serves.
"""
