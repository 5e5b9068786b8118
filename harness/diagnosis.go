package harness

// Diagnosis contains those fields of the doctor's JSON output that tests read.
type Diagnosis struct {
	Chains []struct {
		Links   []struct{ Link, State, What string }
		Finding struct{ Link, Reason, Wrong, Do, Next string }
	}
}

// Unseen returns the links that the doctor could not check, with the reasons.
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
