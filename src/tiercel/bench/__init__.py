"""`tiercel bench`: the workloads people argue about, with offloading and without, on any OpenAI server."""
