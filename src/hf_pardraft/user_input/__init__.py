"""What users bring: files, data sets, options, secrets, and models by name; read, or refused in one line that names them."""
