"""The planner (cost model, search, simulation) comes here; nothing yet."""
