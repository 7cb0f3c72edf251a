"""In what order: pipeline schedules as data, from builders to simulation, proof and pictures."""
