"""Parts for Twofold, a file each: two optimizers, a communication hook, a backend, a schedule, an exchange."""
