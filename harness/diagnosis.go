package harness

// Diagnosis is what the driver's doctor prints as JSON, as far as tests read it.
type Diagnosis struct {
	Chains []struct {
		Links   []struct{ Link, State, What string }
		Finding struct{ Link, Reason, Wrong, Next string }
	}
}

// Unseen returns the links that could not be seen, and why.
func (d Diagnosis) Unseen() []string {
	var unseen []string
	for _, c := range d.Chains {
		for _, l := range c.Links {
			if l.State == "unseen" {
				unseen = append(unseen, l.Link+": "+l.What)
			}
		}
	}
	return unseen
}
