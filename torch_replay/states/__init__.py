"""What any host may use: memory of recurrent states, model states, metadata builders, specialised decode, warm-up."""
