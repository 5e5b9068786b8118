package doctor

import "io"

// bundle is what a support case needs. The evidence was sifted: no Secret, no environment, no mount
// option, no token and no text of others is in it.
type bundle struct {
	Format    int       `json:"format"`
	Version   string    `json:"version"`
	Diagnosis Diagnosis `json:"diagnosis"`
	Evidence  Evidence  `json:"evidence"`
}

const bundleFormat = 1

// WriteBundle writes the diagnosis and its evidence as JSON.
func WriteBundle(w io.Writer, d Diagnosis, e Evidence) error {
	text, err := indented(bundle{Format: bundleFormat, Version: e.Version, Diagnosis: d, Evidence: e})
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}
