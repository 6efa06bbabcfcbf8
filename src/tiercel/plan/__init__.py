"""Sizing, planning and simulation: arithmetic on configurations and traces, without GPU or store."""
