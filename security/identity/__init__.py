"""Keys, certificates, the roster, and signatures over documents."""
