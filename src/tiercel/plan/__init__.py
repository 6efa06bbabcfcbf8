"""Sizing, planning and simulation: arithmetic on configurations and traces. Never touches a GPU or a store."""
