"""What a pass costs here, measured: the ground on which a planner decides how many rows are worth it."""
