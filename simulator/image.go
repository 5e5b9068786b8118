package simulator

import "net/http"

// imageList lists the project's images, or, without a project, the silo's (A44).
func (s *Server) imageList(r *request) (int, any, error) {
	if r.query.Get("project") != "" {
		return listInProject(s, r, images)
	}
	return list(s, r, images, func(*tx) (string, error) { return "", nil })
}

func (s *Server) imageView(r *request) (int, any, error) {
	var img image
	err := s.store.view(func(tx *tx) error {
		var err error
		img, err = lookup(s, r, tx, images, r.path.Get("image"))
		return err
	})
	return http.StatusOK, img, err
}
