package concurrency

// callers is how many there are at once.
const callers = 64

func (s *site) oneVolume(round int) {}
func (s *site) lives(round int)     {}
